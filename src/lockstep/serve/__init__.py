"""`lockstep serve`: the Tinker API over Lockstep's train backend and native engine, on this machine.

app       HTTP: who may ask, how much, and what for
service   what each request does to sessions, models and checkpoints
work      one thread that executes requests in order, and the futures of their results
models    a base model, the adapters trained on it, and what samples from them
ranks     models that several processes train together
answers   what requests of trainers and samplers are answered with
listing   the pages of training runs and checkpoints
losses    the API's losses as TokenLosses
wire      protobuf and JSON, by the definitions that the `tinker` package ships
store     checkpoints and tokens in the run directory
"""
