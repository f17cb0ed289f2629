"""Speculative decoding: draft tokens that one step verifies. They make tokens faster, not different."""
