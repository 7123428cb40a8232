"""Run eyas on several processes or machines, on Ray, which is installed with `eyas[ray]`.

    options.py     how many replicas, and what Ray Serve is told about them; no Ray is needed to read it
    replica.py     one server as a replica of Ray Serve
    fleet.py       the application for `serve run` and `serve deploy`, and a fleet on this machine
    gate.py        before Ray's HTTP proxy: sessions, requests that are repeated, streams that end with an error
    sessions.py    from the body of a request to the name of its session
    pages.py       the metrics of all replicas on one page
    data.py        work on many items: generate, regenerate, features and datastore build with --workers
    training.py    a training whose processes Ray starts, and starts again
    serving.py     `eyas serve` as a fleet; what `serve deploy` and `ray.serve.llm` import

It is its own distribution, and eyas finds it by entry points of the group "eyas.parts". Only `serving.py` knows
the server of eyas: a caller gives the others a function that makes one (`replica.Server`). Nothing imports Ray
before it is asked for.
"""

__version__ = "0.1.0"
