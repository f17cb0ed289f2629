"""From traces to metrics: TTFT, TPOT, ITL, their statistics, steady state, step traces, cost."""
