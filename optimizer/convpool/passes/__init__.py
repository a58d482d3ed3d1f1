"""The rewrite passes.  A pass has no state: `sites` yields, `check` returns a Plan or a Reject; `rewrite` applies."""
