"""Files of requests, answered by the engine without HTTP."""
