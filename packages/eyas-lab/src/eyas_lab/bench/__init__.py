"""Comparisons of methods on the same prompts at the same temperatures, with everything that a check of the
figures needs: every answer, the machine, and intervals.

tasks/          prompts: bundled, public sets, the user's own              record.py    Answer: one line of the record
contestants.py  methods of eyas; transformers' generate                    rows.py      a table of figures from Answers (pure)
run.py          asks, compares texts, resumes, survives failures           simulate.py  verification with given acceptance rates
cost.py         bandwidth and memory                                       card.py      the machine that the figures come from
trees.py        one cycle's tree as text                                   report.py    the summary as Markdown
summary.py      everything in one object                                   intervals.py ratios, and how sure they are
"""
