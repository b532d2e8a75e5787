"""The engine: the scheduling wing, the worker wing, and the messages between them."""
