# Weft with torch for CUDA: docker build -t weft . && docker run --rm --gpus all weft weft doctor
# The CUDA runtime image has no compiler and no CUDA toolkit: the wheel needs neither (torch brings NVRTC).
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make python3 python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /weft
COPY . .
RUN python3 -m venv /build && /build/bin/pip wheel --no-cache-dir --no-deps -c constraints.txt -w /wheels .

FROM ${CUDA_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/weft && /opt/weft/bin/pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
ENV PATH=/opt/weft/bin:$PATH
CMD ["weft", "doctor"]
