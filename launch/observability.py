"""The command-line options of what a server tells of itself: the form of its log, and traces."""

import argparse

from apbv.serve.log import LOG_FORMATS
from apbv.serve.tracing import require_traceable


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the log and of traces."""
    observability = parser.add_argument_group("observability")
    observability.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="lines to read, or JSON objects with the same and more (default %(default)s)",
    )
    observability.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each request by OTLP over HTTP, as to http://host:4318/v1/traces (default: none)",
    )


def check_observability(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with one line where traces cannot be sent."""
    if options.otlp_traces_endpoint is not None:
        try:
            require_traceable(options.otlp_traces_endpoint)
        except ValueError as error:
            parser.error(f"--otlp-traces-endpoint: {error}")
