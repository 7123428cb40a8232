"""Is a deployment lossless? `eyas audit` compares its answers with the target's own forward.

    deployments.py   what can be audited: eyas, transformers' `generate`, anything with a `generate`
    server.py        ... and servers of OpenAI's interface
    referee.py       the target's own forward over what was answered; what rounding explains
    statistics.py    tests of sampled tokens
    arms.py          biases that must be found, and the power of the tests
    run.py           an audit from the first request to the verdict
    report.py        JSON, Markdown

From Python:

    llm = eyas.load("MODEL", method="vanilla")
    report = audit(MyDeployment(), EyasDeployment(llm), Referee(llm.target.model, llm.eos), Plan((llm.ids("Hello"),)))
    report["verdict"]  # "passed", "failed" or "not enough data"
"""

from eyas_lab.audit.deployments import Answer, Deployment, EyasDeployment, TransformersDeployment
from eyas_lab.audit.referee import Referee
from eyas_lab.audit.run import Plan, audit
from eyas_lab.audit.server import ServerDeployment

__all__ = [
    "Answer", "Deployment", "EyasDeployment", "Plan", "Referee", "ServerDeployment", "TransformersDeployment", "audit",
]  # fmt: skip
