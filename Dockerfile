# Gulliver with all extras. CPU: docker build -t gulliver .
# CUDA: docker build -t gulliver --build-arg TORCH=cuda . (start with docker run --gpus all)
FROM python:3.11-slim-bookworm

# cpu or cuda: which build of torch.
ARG TORCH=cpu
ARG TORCH_VERSION=2.13.0
# Extras of pyproject.toml to install.
ARG EXTRAS=finetune,serve,train

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ cmake git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/gulliver
RUN if [ "$TORCH" = cpu ]; then \
      pip install --no-cache-dir "torch==$TORCH_VERSION" --index-url https://download.pytorch.org/whl/cpu; \
    else \
      pip install --no-cache-dir "torch==$TORCH_VERSION"; \
    fi
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"

WORKDIR /work
CMD ["gulliver", "doctor"]
