"""Run eyas on several processes or machines, on Ray, which is installed with `eyas[ray]`.

    options.py     how many replicas, and what Ray Serve is told about them; no Ray is needed to read it
    replica.py     one server as a replica of Ray Serve
    fleet.py       the application for `serve run` and `serve deploy`, and a fleet on this machine
    gate.py        before Ray's HTTP proxy: sessions, requests that are repeated, streams that end with an error
    sessions.py    from the body of a request to the name of its session
    pages.py       the metrics of all replicas on one page
    data.py        work on many items: generate, regenerate, features and datastore build with --workers
    training.py    a training whose processes Ray starts, and starts again

This package knows no server of eyas: a caller gives it what makes one (`replica.Server`). Nothing imports Ray before
it is asked for.
"""
