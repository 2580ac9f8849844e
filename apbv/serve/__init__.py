"""OpenAI-compatible HTTP server in front of one engine on all hosts.

Host 0 speaks HTTP in its main thread and runs the engine, one request at a time, in another; the
other hosts follow it. Needs the packages of the extra ``serve``.
"""
