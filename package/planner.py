"""The planner's public names: `plan(PlanRequest("llama-70b", context="128k"))`. No torch is loaded."""

from llmopt.engine.config.plan_options import PlanRequest
from llmopt.engine.planner.plan import DeploymentPlan
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.plan_request import plan_for as plan

__all__ = ["DeploymentPlan", "PlanRequest", "plan", "plan_as_dict"]
