"""Everything a user can get wrong in a configuration ends in one line that names the fix."""

import builtins
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator, model_validator

from dora_rl.config import ConfigModel, apply_overrides, dump_toml, load_toml, merged, validate
from dora_rl.core.protocol.errors import UserError


class Mode(StrEnum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True)
class Orchestration:
    max_staleness: int = 3
    pressure: float = 0.9
    mode: Mode = Mode.FAST
    weights: tuple[float, ...] = (1.0, 2.0)
    retries: int = field(default=1, metadata={"fix": "Use 0 to give up at once."})

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise UserError(
                f"max_staleness must be >= 0: `{self.max_staleness}`. "
                "Use 0 for synchronous training."
            )
        if self.pressure > 1:
            raise ValueError("pressure and mode disagree.\nLower one.")


class Cluster(ConfigModel):
    instances: int = Field(4, ge=1)
    max_instances: int = 8
    fast_network: bool = True
    device: Literal["h100", "a100"] = "h100"
    depth: int | Literal["auto"] = "auto"
    memory: float | None = None
    names: tuple[str, ...] = ()

    @field_validator("names")
    @classmethod
    def _unique(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("must be unique. Rename one.")
        return names

    @model_validator(mode="after")
    def _room(self) -> "Cluster":
        if self.instances > self.max_instances:
            raise ValueError(f"instances must be <= max_instances: `{self.instances}`. Lower it.")
        return self


class Lognormal(ConfigModel):
    kind: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)


class Pareto(ConfigModel):
    kind: Literal["pareto"]
    alpha: float = Field(1.5, gt=1)


class Loose(BaseModel):  # without extra="forbid"
    size: int = 1


class Root(ConfigModel):
    name: str = "unnamed"
    orchestration: Orchestration = Orchestration()
    cluster: Cluster = Cluster()
    lengths: Annotated[Lognormal | Pareto, Field(discriminator="kind")] = Lognormal(median=9.0)
    stages: list[Loose] = Field(default_factory=list)
    pools: dict[str, Loose] = Field(default_factory=dict)


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        validate(Root, data, "my.toml")
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- files


def test_load_reads_toml_with_and_without_byte_order_mark(tmp_path: Path) -> None:
    plain, marked = tmp_path / "a.toml", tmp_path / "b.toml"
    plain.write_bytes(b"[a]\r\nb = 1\r\n")
    marked.write_bytes(b"\xef\xbb\xbf[a]\nb = 1\n")
    assert load_toml(plain) == load_toml(str(marked)) == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{}", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a = '\xff'", "not UTF-8 text"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_load_refuses_bad_content(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_toml(path)
    message = str(caught.value)
    assert problem in message
    assert f"`{path}`" in message  # in full, however long
    assert "\n" not in message


def test_load_refuses_what_it_cannot_open(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_toml(tmp_path / "absent.toml")
    with pytest.raises(UserError, match="directory"):
        load_toml(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        load_toml("a\0b")
    with pytest.raises(UserError, match=r"cannot read .*too long"):
        load_toml("a" * 5000)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot read"):
        load_toml(tmp_path / "file" / "below.toml")


def test_load_refuses_an_unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: str, mode: str) -> BinaryIO:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(builtins, "open", locked)
    with pytest.raises(UserError, match=r"no permission to read: `locked\.toml`"):
        load_toml("locked.toml")


# --- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("2.5e-3", 0.0025),
        ("1_000", 1000),
        ("true", True),
        ("True", "True"),
        ("[1, 2]", [1, 2]),
        ('{kind = "pareto"}', {"kind": "pareto"}),
        ('"3"', "3"),
        ('""', ""),
        ("h100", "h100"),
        ("two words", "two words"),
        ("[1, 2", "[1, 2"),
        ("a=b", "a=b"),
    ],
)
def test_override_values_are_toml_or_plain_strings(text: str, value: object) -> None:
    result = apply_overrides({}, [f"a.b={text}"])
    assert result == {"a": {"b": value}}
    assert type(result["a"]["b"]) is type(value)


def test_overrides_apply_in_order_to_a_copy() -> None:
    data = {"a": {"b": 1, "c": 2}, "list": [{"x": 1}, {"x": 2}]}
    result = apply_overrides(data, ["a.b=3", "a.b = 4", "d=5", "list.1.x=9"])
    assert result == {"a": {"b": 4, "c": 2}, "d": 5, "list": [{"x": 1}, {"x": 9}]}
    assert data == {"a": {"b": 1, "c": 2}, "list": [{"x": 1}, {"x": 2}]}


@pytest.mark.parametrize(
    "override",
    ["a", "", "=1", "a.=1", ".a=1", "a..b=1", "a b=1", "a=", "a= ", "a=1\nb=2", "a=\udcff"],
)
def test_malformed_overrides_show_the_right_form(override: str) -> None:
    with pytest.raises(UserError, match="--set") as caught:
        apply_overrides({}, [override])
    assert "Write --set" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["a.b.c=1", "list.2=1", "list.x=1", "list.-1=1"])
def test_overrides_cannot_pass_through_a_value_or_beyond_a_list(override: str) -> None:
    with pytest.raises(UserError, match=r"is a value, not a section|has 2 entries"):
        apply_overrides({"a": {"b": 1}, "list": [1, 2]}, [override])


# --- validation


def test_nothing_gives_the_defaults_and_everything_is_taken() -> None:
    assert validate(Root, {}, "my.toml") == Root()
    root = validate(
        Root,
        {
            "name": "x",
            "orchestration": {"max_staleness": 0, "pressure": 1, "mode": "exact", "weights": [3]},
            "cluster": {"depth": 5, "memory": 80, "device": "a100"},
            "lengths": {"kind": "pareto", "alpha": 2},
            "stages": [{"size": 2}],
            "pools": {"any name": {"size": 3}},
        },
        "my.toml",
    )
    assert root.orchestration == Orchestration(0, 1.0, Mode.EXACT, (3.0,))
    assert root.cluster.depth == 5
    assert root.lengths == Pareto(kind="pareto", alpha=2.0)
    assert root.stages[0].size == 2
    assert root.pools["any name"].size == 3


def test_a_dataclass_can_be_the_root() -> None:
    assert validate(Orchestration, {"max_staleness": 1}, "s") == Orchestration(1)
    with pytest.raises(UserError, match=r"^max_staleness must be >= 0: `-1`\."):
        validate(Orchestration, {"max_staleness": -1}, "s")
    with pytest.raises(UserError, match="Did you mean `max_staleness`"):
        validate(Orchestration, {"max_stalenes": 1}, "s")


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (
            "orchestration",
            "max_staleness",
            -1,
            "orchestration.max_staleness must be >= 0: `-1`. Use 0 for synchronous training.",
        ),
        (
            "orchestration",
            "max_staleness",
            "3",
            "orchestration.max_staleness must be an integer: `3`. Remove the quotes.",
        ),
        (
            "orchestration",
            "max_staleness",
            True,
            "orchestration.max_staleness must be an integer: `true`. The default is `3`.",
        ),
        (
            "orchestration",
            "max_staleness",
            3.0,
            "orchestration.max_staleness must be an integer: `3.0`. Write 3.",
        ),
        (
            "orchestration",
            "max_staleness",
            {},
            "orchestration.max_staleness must be an integer: `{}`. The default is `3`.",
        ),
        (
            "orchestration",
            "pressure",
            True,
            "orchestration.pressure must be a number: `true`. The default is `0.9`.",
        ),
        (
            "orchestration",
            "pressure",
            float("nan"),
            "orchestration.pressure must be a number: `nan`. Give its value.",
        ),
        (
            "orchestration",
            "pressure",
            2.0,
            "orchestration.pressure and mode disagree. Lower one.",
        ),
        (
            "orchestration",
            "mode",
            "exakt",
            "orchestration.mode must be one of `fast`, `exact`: `exakt`. Did you mean `exact`?",
        ),
        (
            "orchestration",
            "retries",
            "many",
            "orchestration.retries must be an integer: `many`. Use 0 to give up at once.",
        ),
        (
            "cluster",
            "instances",
            0,
            "cluster.instances must be >= 1: `0`. The default is `4`.",
        ),
        (
            "cluster",
            "instances",
            9,
            "cluster.instances must be <= max_instances: `9`. Lower it.",
        ),
        (
            "cluster",
            "fast_network",
            "True",
            "cluster.fast_network must be true or false: `True`. "
            "Write true, in lower case and without quotes.",
        ),
        (
            "cluster",
            "fast_network",
            1,
            "cluster.fast_network must be true or false: `1`. The default is `true`.",
        ),
        (
            "cluster",
            "depth",
            "atuo",
            "cluster.depth must be an integer or `auto`: `atuo`. Did you mean `auto`?",
        ),
        (
            "cluster",
            "memory",
            float("inf"),
            "cluster.memory must be a finite number: `Infinity`. Leave it out for the default.",
        ),
        ("cluster", "names", ["a", "a"], "cluster.names must be unique. Rename one."),
        (
            "lengths",
            "kind",
            "paretto",
            "lengths.kind must be one of `lognormal`, `pareto`: `paretto`. Did you mean `pareto`?",
        ),
    ],
)
def test_bad_values_are_named_with_their_section_and_fix(
    section: str, key: str, value: object, message: str
) -> None:
    assert refusal({section: {key: value}}) == message


def test_bad_values_inside_unions_lists_and_tables_are_named_as_the_user_wrote_them() -> None:
    assert refusal({"lengths": {"kind": "pareto", "alpha": 1}}).startswith(
        "lengths.alpha must be > 1"
    )
    assert refusal({"stages": [{}, {"size": "x"}]}).startswith("stages.1.size must be an integer")
    assert refusal({"pools": {"p": {"size": "x"}}}).startswith("pools.p.size must be an integer")
    assert refusal({"orchestration": {"weights": [1, "x"]}}).startswith(
        "orchestration.weights.1 must be a number"
    )


def test_a_missing_key_says_where_to_add_it() -> None:
    message = "lengths.median is missing. Add it to `my.toml`, or pass --set lengths.median=value."
    assert refusal({"lengths": {"kind": "lognormal"}}) == message
    assert refusal({"lengths": {}}).startswith("lengths.kind is missing.")


def test_a_value_in_place_of_a_section_is_refused() -> None:
    assert refusal({"orchestration": 3}).startswith("orchestration must be a table: `3`.")
    assert refusal({"cluster": [1]}).startswith("cluster must be a table: `[1]`.")
    assert refusal({"stages": {}}).startswith("stages must be an array: `{}`.")


def test_every_wrong_key_is_named() -> None:
    message = refusal({"name": 1, "cluster": {"instances": 0, "device": "tpu"}})
    assert message.startswith("name must be a string: `1`.")
    assert message.endswith("Also wrong: `cluster.instances`, `cluster.device`.")


def test_a_long_or_multiline_value_stays_one_short_line() -> None:
    message = refusal({"cluster": {"instances": "x\n" * 1000}})
    assert len(message) < 200


@pytest.mark.parametrize(
    ("data", "suggestion"),
    [
        ({"orchestration": {"max_stalenes": 1}}, "`orchestration.max_staleness`?"),
        ({"orchestraton": {"max_staleness": 1}}, "`orchestration`?"),
        ({"cluster": {"Instances": 1}}, "`cluster.instances`?"),
        # Nearer to a key of another section than to max_instances, which is alike as well.
        (
            {"cluster": {"max_staleness": 1}},
            "`orchestration.max_staleness`, which is in another section?",
        ),
        ({"max_staleness": 1}, "`orchestration.max_staleness`, which is in another section?"),
        ({"stages": [{"sise": 1}]}, "`stages.0.size`?"),
        ({"pools": {"p": {"sise": 1}}}, "`pools.p.size`?"),
        ({"lengths": {"kind": "pareto", "alpa": 1}}, "`lengths.alpha`?"),
    ],
)
def test_unknown_keys_name_the_nearest(data: dict[str, Any], suggestion: str) -> None:
    message = refusal(data)
    assert message.startswith("unknown key: `")
    assert message.endswith(f"Did you mean {suggestion}")


def test_unknown_keys_without_a_near_one_list_what_is_known() -> None:
    message = refusal({"lengths": {"kind": "pareto", "zzz": 1}})
    assert (
        message == "unknown key: `lengths.zzz`. Known keys of section `lengths`: `alpha`, `kind`."
    )
    message = refusal({"lengths": {"kind": "pareto", "median": 1}})
    assert message.startswith("key of another kind of section `lengths`: `lengths.median`.")


# --- saving


def test_a_dumped_configuration_reads_back_the_same() -> None:
    root = Root(
        name='quote " and \\ and ünïcode',
        orchestration=Orchestration(0, 1e-9, Mode.EXACT, ()),
        cluster=Cluster(depth=3, names=("a", "b")),
        lengths=Pareto(kind="pareto", alpha=2.0),
        stages=[Loose(size=2), Loose()],
        pools={"a b.c": Loose()},
    )
    assert validate(Root, tomllib.loads(dump_toml(root)), "saved") == root
    settings = Orchestration(7)
    assert validate(Orchestration, tomllib.loads(dump_toml(settings)), "saved") == settings


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
)
_KEYS = st.sampled_from(
    ["name", "orchestration", "cluster", "lengths", "kind", "stages", "pools", "instances", "x"]
) | st.text(max_size=3)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_KEYS, _TREES, max_size=4))
def test_any_data_is_taken_or_refused_in_one_line(data: dict[str, Any]) -> None:
    try:
        root = validate(Root, data, "my.toml")
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert validate(Root, tomllib.loads(dump_toml(root)), "saved") == root


def test_sections_are_laid_over_each_other_key_by_key() -> None:
    assert merged({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}, "b": {"z": 4}}) == {
        "a": {"x": 1, "y": 3},
        "b": {"z": 4},
    }
