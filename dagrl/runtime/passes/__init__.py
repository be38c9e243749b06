"""Graph passes: rewrite a traced graph before it is compiled."""
