"""What torch says of itself, as one line: `python -m dora_rl.doctor.torch_build`.

In a process of its own, for a build that does not fit the processor dies at its import.
"""


def describe() -> str:
    """Version, device, instruction set, libraries."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "no GPU"
    names = {"mkl": "MKL", "mkldnn": "oneDNN", "openmp": "OpenMP"}
    libraries = {
        name: getattr(torch.backends, module).is_available() for module, name in names.items()
    }
    words = [
        f"torch {torch.__version__}",
        device,
        f"{torch.backends.cpu.get_cpu_capability()} kernels",
        f"{torch.get_num_threads()} threads",
        *(name if there else f"no {name}" for name, there in libraries.items()),
    ]
    return ", ".join(words)


if __name__ == "__main__":
    print(describe())
