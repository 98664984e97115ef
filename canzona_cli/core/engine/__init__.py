"""Executes a `Plan`: every rank sends its gradient fragments to the hosts of their matrices, which update
whole matrices and send fragments of the new weights back.

The ranks of a pipeline stage are a grid. Along a row, tensor-parallel (TP) ranks store different fragments of
every matrix; down a column, data-parallel ranks store the same fragments. The plan assigns each matrix to a
cell of the grid:

                     TP 0         TP 1         TP 2         TP 3
                 +------------+------------+------------+------------+
    owner 0      |  q0   o0   |  k0   u1   |  v0   d0   |  g0        |  A matrix's row is its owner, which has
    (dp 0)       |            |            |            |            |  its reduced gradient; its column is
                 +------------+------------+------------+------------+  its host, which updates it as a whole.
    owner 1      |  q1   d1   |  u0   k1   |  v1        |  o1   g1   |
    (dp 1)       |            |            |            |            |
                 +------------+------------+------------+------------+

The path of one matrix, `u0`, through a step:

    backward         every rank has a gradient fragment of u0, for its own tokens
      1. reduce      down each column, to row 1: the owners have reduced fragments
      2. send        along row 1: TP 0, 2 and 3 send their fragments to TP 1 in an all-to-all per micro-group
      3. update      TP 1 has all of u0: momentum, Newton-Schulz, new fp32 master
      4. return      along row 1: fragments of the new weight, in the model's dtype
      5. gather      down each column, from row 1 to the parameters of every owner

Steps 1 and 5 are in `megatron/owner_bucket_group`; 2 and 4 in `hosted` and `wire`, along the routes of
`planner/exchange`; 3 in `optimizers`.

A shared matrix does not have a host: its fragments stay on the ranks of its owner's row. After the
micro-groups, every rank of the row updates its fragment. Between matmuls the ranks exchange square matrices
as long as the matrix's short side (`shared`).

Experts that are divided among ranks (`parallel.ep`; see the picture in `model/README.md`) take steps 1, 3 and
5 only: their gradients are reduced over the cells that have the same experts, and the plan chooses one of
these cells, which stores the whole expert, as its owner and host. A rank updates its experts first; meanwhile
the fragments of step 2 arrive.

Steps 2 to 4 are a pipeline over micro-groups (`planned`): while group i is updated, gradients of group i + 1
are received and weights of group i - 1 are sent. Megatron's AdamW updates all other parameters
(`canzona_optimizer` chains the two). Strategy sc does not have a plan: every rank updates every matrix of its
stage (`redundant`). `build` puts the parts together.
"""
