"""The process of the driver: it knows the core and every worker, and holds no tensor."""
