"""`python -m canzona_cli` is `canzona`."""

from canzona_cli.app import main

main()
