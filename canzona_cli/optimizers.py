"""The matrix optimizers (`canzona_cli.core.optimizers`) under their public path."""

from canzona_cli.core import optimizers


def __getattr__(name: str) -> object:
    return getattr(optimizers, name)


def __dir__() -> list[str]:
    return optimizers.__all__
