# syntax=docker/dockerfile:1
# lowbit-run serve with PyTorch's CUDA libraries and without a compiler; compose.yaml starts it.
#
#     docker build -t lowbit .
#     docker run --gpus all -p 127.0.0.1:8000:8000 -v ./models:/models:ro \
#         -e MODEL=/models/qwen3-8b-int4 -e LOWBIT_API_KEY=... lowbit
#
# With the kernels of a model for some kinds of GPUs inside, so that its first start is quick too:
#
#     docker build -t lowbit-qwen3-8b --target compiled --build-context model=qwen3-8b-int4 \
#         --build-arg NAME=qwen3-8b-int4 --build-arg ARCH=sm_86,sm_89 .
#
# Never built where it was written, since no registry could be reached there. Its steps are those of
# image/steps, which were run: install, helper and check in an empty environment.

FROM python:3.12-slim-bookworm AS built
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m pip install --no-cache-dir -c constraints.txt build \
    && python -m build --wheel
RUN --mount=type=cache,target=/root/.cache/pip \
    image/steps install /opt/lowbit dist/*.whl constraints.txt
# The folders are part of Triton's keys: the same here and below.
ENV TRITON_CACHE_DIR=/cache/triton TRITON_LIBCUDA_PATH=/opt/libcuda
RUN image/steps helper /opt/lowbit

FROM python:3.12-slim-bookworm AS runtime
ENV PATH=/opt/lowbit/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TRITON_LIBCUDA_PATH=/opt/libcuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOST=0.0.0.0 \
    PORT=8000
RUN useradd --uid 10001 --create-home lowbit \
    && mkdir -p /models /cache/huggingface /cache/triton \
    && chown -R lowbit:lowbit /cache
COPY --from=built /opt/lowbit /opt/lowbit
COPY --from=built --chown=lowbit:lowbit /cache/triton /cache/triton
COPY image/start image/healthy image/steps /opt/image/
USER lowbit
WORKDIR /home/lowbit
RUN /opt/image/steps check /opt/lowbit
VOLUME ["/models", "/cache/huggingface"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=10m --retries=3 CMD ["/opt/image/healthy"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/image/start"]

FROM runtime AS compiled
ARG ARCH
ARG NAME=model
RUN --mount=type=bind,from=model,target=/models/model \
    lowbit-run compile /models/model --arch "$ARCH"
ENV MODEL=/models/$NAME

FROM runtime
