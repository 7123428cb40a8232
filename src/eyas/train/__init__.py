"""Training of draft heads: chat data to counted tokens (`data`), and a loop that knows no method
(`loop`).
"""
