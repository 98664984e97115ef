import canzona_cli.megatron.quick_import  # noqa: F401 - before anything imports Megatron: it saves seconds
