"""Runs `canzona` as `python -m canzona_cli`."""

from canzona_cli.cli.app import main

main()
