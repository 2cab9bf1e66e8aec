"""One enabled model: its budget, engine, graphs and the plans of its steps.

What happens to a graph, in the order of the calls, with the modules:

    capture   `graph_capture` traces it, `compiled_graph` compiles it for its plan
    plan      `step_planning`: by itself, then with the others of its step; `planner` searches, `plan_store` activates
    run       before each step `Session.prepare` ends the last one, and answers what it has shown, see `replan`

A planned step goes through phases, which `History.phase` of its `PlannedStep` names:

    TRACED      planned by estimated costs, or by a plan of the cache or a file; the first run shows the loss's memory
    RECORDED    seconds of a warm run are recorded; the next one times its ops
    CALIBRATED  costs, machine, retention and growth are those of that run; the plan is replaced if they show a cause
    FINAL       growth was measured once more, after the last search; from now on only growth causes a replan

A phase advances by at most one per run, only by runs in the planned order, and survives replans; a step with a new
first plan, as for another order of its graphs, starts at TRACED. Rules:

- Between two steps `Replanner` measures a `StepObservation`, which is immutable; nothing else reads the device for it.
- `replan_triggers` decides without torch and without effects: `counted` adds the observation to the step, `triggers`
  gives the reasons to replan, `merged` completes the one `PlanRequest` for them. At most one search answers it.
- `Planner` searches a request, and activates nothing. It lowers the retention of a refused request, within what
  `RetentionEstimate` allows; the answer names it, and `StepPlans.adopt`, which alone activates plans, assumes it.
- A `PlannedStep` is immutable; `StepPlans` alone replaces it. `BudgetTracker.take_share` and `widen` alone change the
  budget; an `Allowance` is its immutable split for one step.
- Reasons are data, of `lmswap.reporting.replan_reasons`, whose sentences the notes of reports have.
"""
