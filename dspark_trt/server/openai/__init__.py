"""The OpenAI-compatible front end: an HTTP server of our own in front of Triton's gRPC, in a process of its own.

settings, process, __main__    what it is told, started beside `serve`, the process itself
door, body                     connections, the API key, JSON within limits
requests, messages, validation what a client may ask
jobs, triton, pieces           requests to the engine model, gRPC, what comes back of several answers
chat, completions, answers     the answers, whole and as events
generate                       Triton's own generate routes behind the same limits
live, page.html                the live page
app, responses, errors         the routes, answers that end with their client, refusals
"""
