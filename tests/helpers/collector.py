"""A collector of traces that speaks OTLP over HTTP, as OpenTelemetry's own does."""

import http.server

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from patience import wait_for


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what it is sent.

    Attributes:
        spans: all spans so far, in the order in which they ended.
        resources: the attributes of who sent them, for each message.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans, self.resources = [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def add(self, body: bytes) -> None:
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values_of(sent.resource.attributes))
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]

    def named(self, name: str, count: int = 1) -> list:
        """The spans of that name, once there are so many."""
        wait_for(lambda: sum(span.name == name for span in self.spans) >= count)
        return [span for span in self.spans if span.name == name]


def values_of(attributes) -> dict:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue):
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        self.server.add(body)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass
