"""``ctr-pe serve``: serve a model folder over HTTP.

Serve a model folder over HTTP (pip install 'ctr_pe[serve]'): POST /rank takes a user's history and candidates and gives
the candidates with scores, the best first; of a next-item model POST /recommend takes a user or a history and gives the
items that come next; GET /health says which model answers, /ready and /live whether to send it
requests and whether to keep it, /metrics counts for Prometheus. Requests that wait at the same time are scored
together; what cannot have its turn in time is turned away (503). A folder that replaces the served one is loaded
without dropping a request, also at SIGHUP; one that is damaged is refused, and the old model goes on. SIGTERM finishes
open requests. There is no password: beyond this machine only behind a proxy that asks for one.

examples:
  ctr-pe serve --model model --port 8000
  curl localhost:8000/rank -H 'content-type: application/json' -d '{"history": [3, 7], "candidates": [5, 9], "k": 1}'
  curl localhost:8000/recommend -H 'content-type: application/json' -d '{"history": [3, 7], "k": 10}'
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
    add(
        "--max-candidates N",
        "candidates of a request, or k of a next-item model (default: 5000)",
        type=count,
        default=5000,
    )
    add("--max-body BYTES", "of a request (default: 1048576)", type=count, default=2**20)
    add("--max-waiting N", "open requests; more get 503 (default: 256)", type=count, default=256)
    add("--max-wait MS", "until a request has its turn, else 503 (default: 250)", type=count, default=250)
    add("--max-connections N", "open ones; more get 503 (default: 2048)", type=count, default=2048)
    add("--read-timeout S", "for a whole request to arrive (default: 10)", type=count, default=10)
    add("--keep-alive S", "that a connection may be idle (default: 5)", type=count, default=5)
    add("--batch N", "requests scored together (default: 32)", type=count, default=32)
    add("--batch-window MS", "that a batch waits for more requests (default: 0)", type=number, default=0)
    add("--workers N", "batches scored at once (default: 1)", type=count, default=1)
    add("--threads N", "of each scoring (default: 1)", type=count, default=1)
    add("--processes N", "each with a model of its own; the limits hold for each (default: 1)", type=count, default=1)
    add("--log FORMAT", "text or json lines (default: text)", choices=("text", "json"), default="text")
    add("--log-requests", "a line per request", action="store_true")
    scoring_gpu_option(parser)


def run(args: argparse.Namespace) -> int:
    from ctr_pe.serving.service import serve
    from ctr_pe.serving.service_options import Connections, Limits, Queueing, ServiceOptions

    limits = Limits(args.max_history, args.max_candidates, args.max_body)
    queueing = Queueing(
        batch=args.batch, window=args.batch_window / 1000, waiting=args.max_waiting, wait=args.max_wait / 1000
    )
    connections = Connections(args.max_connections, args.read_timeout, args.keep_alive)
    options = ServiceOptions(limits, queueing, connections, workers=args.workers, threads=args.threads, gpu=args.gpu)
    serve(args.model, args.port, args.host, options, args.processes, args.log, args.log_requests)
    return 0
