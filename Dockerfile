# canzona and all that it needs, for GPUs (with NVIDIA's container toolkit) and CPUs; canzona_cli/launch/README.md says
# how to use it. The base has a C compiler, without which SwiGLU and the loss are not fused on GPUs.
FROM python:3.12
WORKDIR /opt/canzona
COPY pyproject.toml README.md ./
COPY canzona_cli canzona_cli
COPY recipes recipes
COPY scripts scripts
RUN pip install --constraint scripts/constraints.txt '.[data,hf,tensorboard]'
WORKDIR /work
CMD ["canzona", "doctor"]
