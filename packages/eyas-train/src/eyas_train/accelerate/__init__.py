"""The plan of `eyas accelerate`, which does the work by other commands of eyas.

    prospect.py    looks at model and machine: speeds and plan
    trial.py       speeds of this machine: answering, reading, training
    plan.py        how the minutes are split, and how long each step takes
    training.py    options of the training, from the time that is left
    material.py    the questions of the training, and the questions of the bench
    questions.py   questions for a target, where the user brings none
    journal.py     what a run has done, kept in a file from which it goes on
    report.py      what was reached: report.json, report.md, a section of the head's card

Nothing here reads options or prints.
"""
