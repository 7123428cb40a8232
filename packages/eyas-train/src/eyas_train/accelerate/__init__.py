"""Decisions and forecasts of `eyas accelerate`, which does the work by other commands of eyas.

    prospect.py    looks at model and machine: speeds, plan, forecast
    trial.py       speeds of this machine: answering, reading, training
    curve.py       how often draft tokens are accepted after so much training
    forecast.py    from acceptance and costs to the speed-up of the best tree
    plan.py        how the minutes are split, and how long each step takes
    training.py    options of the training, from the time that is left
    material.py    the questions of the training, and the questions of the bench
    questions.py   questions for a target, where the user brings none
    journal.py     what a run has done, kept in a file from which it goes on
    report.py      forecast beside measurement: report.json, report.md, a section of the head's card

Nothing here reads options or prints.
"""
