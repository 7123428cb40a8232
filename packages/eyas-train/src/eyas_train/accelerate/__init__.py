"""The plan of `eyas accelerate`, which does the work by other commands of eyas.

    measure.py     speeds of a model on this machine, by short trials, and the plan that follows from them
    plan.py        how the minutes are split, and how long each step takes
    material.py    the questions of the training, and the questions of the bench
    journal.py     what a run has done, kept in a file from which it goes on; what it has reached: report.json, report.md, a
                   section of the head's card

Nothing here reads options or prints.
"""
