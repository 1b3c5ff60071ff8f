# CPU or CUDA image: docker build -t gulliver . (CUDA: run it with --gpus all)
# For another build of torch: --build-arg TORCH_INDEX=URL, as torch's start page lists for each CUDA version and for CPUs.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=
# Extras of pyproject.toml.
ARG EXTRAS=finetune,serve,train

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ cmake git \
    && rm -rf /var/lib/apt/lists/*

# torch first: with it in place, nothing that follows pulls another build.
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}" ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}

WORKDIR /opt/gulliver
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

WORKDIR /work
CMD ["gulliver", "doctor"]
