"""Training of draft heads: chat data to counted tokens, and a loop that knows no method. A distribution of its own.

data.py         chats to token ids (_chat.py), which tokens count, batches; regenerate.py: new replies by the target
features.py     the target's hidden states: computed in the run, or from a folder that was filled before (store.py),
                here or at a URL (remote_store.py)
config.py       the options of a run; setup.py: what follows from them
new_heads.py    heads before their training; start.py: the fit of their first weights
loop.py         the loop; step.py, optim.py: updates and evaluations; dist.py: several processes; alpha.py: real decoding
state.py        from which an interrupted run goes on; output.py: the head's folder; card.py: its model card
reporter.py     log.jsonl, trackers, progress
exports.py      heads for other engines; formats/: the formats that eyas only writes
accelerate/     the plan of `eyas accelerate`; commands/: the commands, which eyas finds by entry points
"""

__version__ = "0.1.0"
