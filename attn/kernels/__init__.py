"""Device code in Triton and the rules that launch it, for every framework: nothing here imports one."""
