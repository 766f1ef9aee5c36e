# Hexad on an image of PyTorch 2.11 or newer with a C compiler (PyTorch's tags that end in -devel have one):
#   docker build --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel --tag hexad .
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

# pip keeps the image's PyTorch, as it meets the requirement.
COPY . /opt/hexad
RUN pip install --no-cache-dir "/opt/hexad[serve]" && hexad --version

WORKDIR /work
CMD ["hexad", "--help"]
