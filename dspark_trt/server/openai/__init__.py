"""The OpenAI-compatible front end: an HTTP server of our own in front of Triton's gRPC, in a process of its own.

door.py       connections: time limits, size of chunks, API key          body.py    a body as JSON, within limits
requests.py   what a client may ask (pydantic)                           jobs.py    a request as engine requests
triton.py     gRPC to the models                                         pieces.py  what comes back, of several choices
chat.py, completions.py, answers.py                                      the answers, whole and as events
generate.py   Triton's own generate routes behind the same limits        live.py    the live page
app.py        the routes                                                 process.py starts all of it beside `serve`
"""
