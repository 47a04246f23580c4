# syntax=docker/dockerfile:1
# The server in a container, as a user without rights: for a CPU, or with --target cuda for an NVIDIA GPU
# (docs/serving.md, "In a container").
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
# Downloaded models and compiled kernels. A volume here keeps them.
ENV BITMIRROR_CACHE=/var/cache/bitmirror
RUN useradd --uid 10001 --create-home bitmirror \
    && install --directory --mode 700 --owner bitmirror --group bitmirror "$BITMIRROR_CACHE"
WORKDIR /models
EXPOSE 8080
ENTRYPOINT ["bitmirror"]
CMD ["serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/api-key"]
# It is healthy when the first model is open.
HEALTHCHECK --start-period=10m --start-interval=2s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health', timeout=5)"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/bitmirror-*.whl)[cuda,serve]"
USER 10001
# Kernels are compiled here, not when the container starts on the GPU.
ARG GPU=sm_90
ARG MODEL=pycoder
RUN bitmirror compile --target "$GPU" -m "$MODEL"

FROM base AS cpu
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/bitmirror-*.whl)[serve]"
USER 10001
