# Penstock's server on CPUs:  docker build -t penstock . && docker run -p 8000:8000 -v models:/models penstock
# What is downloaded from the Hugging Face hub stays in the volume /models. Arguments go to `penstock serve`:
#   docker run -p 8000:8000 -v models:/models -e PENSTOCK_API_KEY=... penstock --model Qwen/Qwen3-0.6B
# PIP_ARGS says where torch comes from, best an index of builds for CPUs, which are a tenth of the size:
#   docker build --build-arg PIP_ARGS='--index-url ...' -t penstock .

FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/penstock
COPY constraints.txt /source/
RUN /opt/penstock/bin/pip install -c /source/constraints.txt $PIP_ARGS torch
COPY CMakeLists.txt LICENSE NOTICE README.md pyproject.toml /source/
COPY penstock /source/penstock
# A build that failed would install the reference kernels alone: here that is an error.
RUN /opt/penstock/bin/pip install -c /source/constraints.txt '/source[serve,grammar]' \
    && /opt/penstock/bin/penstock env --json | grep -qv '"isa": "none"'

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home --home-dir /home/penstock --uid 10001 penstock \
    && install -d -o penstock -g penstock /models
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER penstock
WORKDIR /home/penstock
VOLUME /models
EXPOSE 8000
# /health is good once the model is loaded: large ones take their time.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# First signal: running requests finish, for as long as --shutdown-grace says; docker stop -t 40 waits for it.
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0"]
