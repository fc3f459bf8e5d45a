# Penstock's server on CPUs:  docker build -t penstock . && docker run -p 8000:8000 -v models:/models penstock
# Downloads from the Hugging Face hub are kept in the volume /models. Arguments are passed to `penstock serve`:
#   docker run -p 8000:8000 -v models:/models -e PENSTOCK_API_KEY=... penstock --model Qwen/Qwen3-0.6B
# PIP_ARGS are arguments of pip. An index of CPU builds of torch, for example, reduces the download to a tenth:
#   docker build --build-arg PIP_ARGS='--index-url ...' -t penstock .
# For NVIDIA GPUs. The image contains the CUDA build of torch (pip's default) and a C compiler for triton:
#   docker build --build-arg EXTRAS='serve grammar cuda' --build-arg SYSTEM_PACKAGES='gcc libc6-dev' -t penstock-cuda .
#   docker run --gpus all -p 8000:8000 -v models:/models penstock-cuda --model Qwen/Qwen3-0.6B --devices gpu
# BASE is the base image of both stages. It must be a Debian with Python in /usr/local.
ARG BASE=python:3.12-slim-bookworm

FROM $BASE AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/penstock/bin:$PATH
RUN python -m venv /opt/penstock
COPY constraints.txt /source/
RUN pip install -c /source/constraints.txt $PIP_ARGS torch
# The dependencies are installed before the source is copied, so that a change of the source does not reinstall them.
COPY pyproject.toml /source/
ARG EXTRAS="serve grammar"
RUN python -c "import os, tomllib; project = tomllib.load(open('/source/pyproject.toml', 'rb'))['project']; \
    names = os.environ.get('EXTRAS', 'serve grammar').split(); \
    extras = [package for name in names for package in project['optional-dependencies'][name]]; \
    print(*project['dependencies'], *extras, sep='\n')" > /source/needed.txt \
    && pip install -c /source/constraints.txt -r /source/needed.txt \
    && cd /opt/penstock/lib/python*/site-packages/torch && rm -rf include test bin/test_*
COPY CMakeLists.txt LICENSE NOTICE README.md /source/
COPY penstock /source/penstock
# pip usually installs Penstock without C++ kernels if their build fails. Here a failed build is an error.
# The separate prefix makes Penstock a small layer of the image, above the layer of its dependencies.
RUN pip install --no-deps -C wheel.cmake=true --prefix /opt/own /source \
    && PYTHONPATH=$(echo /opt/own/lib/python*/site-packages) python -c "import penstock.kernels.cpu as kernels; \
    assert kernels.isa() != 'none', 'the C++ kernels were built, but cannot be loaded'"

FROM $BASE
ARG SYSTEM_PACKAGES=""
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 $SYSTEM_PACKAGES && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 penstock \
    && install -d -o penstock -g penstock /models
COPY --from=build /opt/penstock /opt/penstock
COPY --from=build /opt/own /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER penstock
WORKDIR /home/penstock
VOLUME /models
EXPOSE 8000
# /health succeeds when the model is loaded. Large models take long to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# After the first SIGTERM, running requests have --shutdown-grace seconds to finish: use docker stop -t 40.
STOPSIGNAL SIGTERM
ENTRYPOINT ["penstock", "serve", "--host", "0.0.0.0"]
