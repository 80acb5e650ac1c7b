"""`python -m webapp.searches.check`: check a deployment in a process of its own. JSON in, JSON out."""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.codec import from_json
from engine.deployment import Deployment
from engine.errors import UserError
from engine.plan import Plan
from engine.search.start import starting_plan


def main() -> None:
    question = json.load(sys.stdin)
    deployment = from_json(Deployment, question["deployment"])
    plan = Plan.from_json(question["plan"]) if question["plan"] else None
    try:
        answer: dict[str, Any] = {"plan": starting_plan(deployment, plan).to_json()}
    except UserError as error:
        answer = {"error": error.sentence, "code": error.code, "field": error.field}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
