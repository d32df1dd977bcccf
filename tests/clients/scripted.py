"""The script of the model in the rounds of tools."""

from __future__ import annotations

import json

MODEL = "penstock-demo"
QUESTION = "How fast is the pump?"
TOOL = "get_speed"
THOUGHT = "I need the tool."
SAYS = "I look it up."
RESULT = "4 km/h"
REPORT = "It goes at 4 km/h."
SCRIPT = json.dumps(
    {
        "rules": [
            {"match": {"tool": TOOL, "text": RESULT}, "reply": {"text": REPORT}},
            {
                "match": {"last": "user", "text": QUESTION},
                "reply": {
                    "reasoning": THOUGHT,
                    "text": SAYS,
                    "calls": [{"name": TOOL, "arguments": {"name": "pump ä"}}],
                },
            },
        ]
    }
)
