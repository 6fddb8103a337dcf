"""RezusCloud: declares, builds and runs Kubernetes clusters ("tenants") through OpenTofu."""

__version__ = "0.1.0"
