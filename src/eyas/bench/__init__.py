"""Honest comparisons: methods x prompts x temperatures, prompt by prompt, with what it takes to believe them.

tasks/          prompts: bundled, public sets, the user's own              record.py    an Answer: what is written down
contestants.py  methods of eyas; transformers' generate                    metrics.py   figures from Answers (pure)
run.py          asks, compares texts, goes on where it was stopped         probe.py     drafted trees node by node
cost.py         bandwidth, flops, memory; what a pass needs                simulate.py  given acceptance rates instead of verification
profile.py      a cycle's stages, traces, how far a pass is from its bound
machine.py      what it ran on, and whether it was busy                    summary.py, report.py, plots.py   JSON, Markdown, HTML, SVG
"""
