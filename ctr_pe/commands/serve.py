"""``ctr-pe serve``: serve a model folder over HTTP.

Serve a model folder over HTTP (pip install 'ctr_pe[serve]'): POST /rank takes a user's history and candidates and gives
the candidates with scores, the best first; GET /health says which model answers, GET /metrics counts for Prometheus.
A folder that replaces the served one is loaded without dropping a request, also at SIGHUP; one that is damaged is
refused, and the old model goes on. SIGTERM finishes open requests. There is no password: beyond this machine only
behind a proxy that asks for one.

examples:
  ctr-pe serve --model model --port 8000
  curl localhost:8000/rank -H 'content-type: application/json' -d '{"history": [3, 7], "candidates": [5, 9], "k": 1}'
"""

from __future__ import annotations

import argparse

from ctr_pe.commands.options import Parser, count, model_option, number, scoring_gpu_option


def add_options(parser: Parser) -> None:
    add = parser.option
    model_option(parser)
    add("--port N", "0 for any that is free, which the log names", type=number, required=True)
    add("--host ADDRESS", "where to listen (default: 127.0.0.1, this machine only)", default="127.0.0.1")
    add("--max-history N", "items of a history (default: 1000)", type=count, default=1000)
    add("--max-candidates N", "candidates of a request (default: 5000)", type=count, default=5000)
    add("--max-body BYTES", "of a request (default: 1048576)", type=count, default=2**20)
    add("--max-waiting N", "open requests; more get 503 (default: 256)", type=count, default=256)
    add("--workers N", "requests scored at once (default: 1)", type=count, default=1)
    add("--threads N", "of each scoring (default: 1)", type=count, default=1)
    scoring_gpu_option(parser)


def run(args: argparse.Namespace) -> int:
    import logging

    from ctr_pe.serving.service import Limits, application, serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("ctr_pe").setLevel(logging.INFO)
    limits = Limits(args.max_history, args.max_candidates, args.max_body, args.max_waiting)
    app = application(args.model, limits, workers=args.workers, threads=args.threads, gpu=args.gpu)
    serve(app, args.port, args.host)
    return 0
