import canzona_cli.core.megatron.quick_import  # noqa: F401 - before anything imports Megatron: it saves seconds
