# The server in an image, for CPUs or for CUDA: pip's default torch for Linux is a CUDA build, PyTorch's index for CPUs has the smaller one.
#     docker build -t eyas-cuda .
#     docker build -t eyas-cpu --build-arg PIP_EXTRA_INDEX_URL=ADDRESS_OF_PYTORCHS_CPU_WHEELS .
#     docker run -p 127.0.0.1:8000:8000 -e EYAS_API_KEY=... -v eyas-cache:/home/eyas/.cache eyas-cpu [--target MODEL --draft HEAD ...]
# For CUDA add --gpus all to `docker run`: the wheels bring CUDA's libraries, the host brings the driver. GPU kernels: packages/eyas-gpu.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# g++ compiles the kernels for this processor when the server first starts; without it the model's own forward runs.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 eyas \
 && install -d -o eyas -g eyas /home/eyas/.cache

# torch first: this layer is by far the largest, and stays the same while eyas changes.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch

COPY pyproject.toml MANIFEST.in README.md LICENSE NOTICE ./
COPY tiny ./tiny
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ./tiny '.[tiny,serve]'

USER eyas
WORKDIR /home/eyas
VOLUME /home/eyas/.cache
EXPOSE 8000
HEALTHCHECK --start-period=120s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["eyas", "serve", "--host", "0.0.0.0"]
