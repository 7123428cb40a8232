"""`eyas serve`: a server for the clients of OpenAI's and Anthropic's interfaces.

    records.py       the internal request and the stream of what is generated for it; settings.py: limits of a server
    engine.py        the one thread that decodes, and how that stream comes from the Decoder's Steps
    pool.py          the Decoders of that thread, by method and by number of rows
    answers.py       the asyncio side of one request: what the thread has generated so far
    cycles.py        from the Decoder's Steps to objects for the page
    metrics.py       counters for Prometheus; figures of the last seconds as JSON for the page

    completions.py (and llama.cpp's /infill), chat.py, responses.py, messages.py (Anthropic's)
                     one dialect each: its bodies, from a body to the internal request, and from the stream to a response
    info.py          endpoints that generate nothing
    service.py, fields.py, reply.py
                     what the dialects share: prompts and jobs; fields of bodies; whole responses and events
    tools.py, images.py, middle.py, logprobs.py, memory.py
                     functions that a model may call, images, prompts for the middle of a text, log-probabilities as
                     clients read them, earlier responses
    reading.py       an answer in parts: content, reasoning, calls; marks.py: the marks by which each family of models
                     tells them apart; calls.py: from the text of a call to a function and its arguments
    errors.py, auth.py, http.py
                     errors in each dialect's form; keys and host names; request ids, the access log, reading bodies
    page/            the page: HTML, CSS and JavaScript modules, served as they are
    app.py           the routes; server.py: uvicorn, SIGTERM and the end of the process

No module here knows trees or models: they know requests, tokens and HTTP.
"""
