"""Operations over a sequence's constant state: causal convolution, gated delta rule, state space scan."""
