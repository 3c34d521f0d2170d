"""The Triton programs of attention over packed rows: forward, and the two halves of backward."""

import triton
import triton.language as tl

# A score that nobody sees. Finite: a row may see nothing of the first tiles its program goes
# through, and what it gathers there is multiplied by exactly 0 when it comes to what it sees.
_HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def forward(
    query, key, value, bounds, output, log_sums, scale, window, length, heads, group,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of the output, and the logarithm (of base 2) of what each row's scores add up to."""
    first = tl.program_id(0) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, location = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    starts = bounds + batch * 2 * length
    start = tl.load(starts + row, mask=row < length, other=0)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    q = _tile(query, first, length, query_token, ROWS, WIDTH, WIDE, True)
    begin, clear, diagonal, end = _column_bounds(starts, first, length, window, ROWS, COLUMNS)
    best = tl.full([ROWS], _HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, WIDE], tl.float32)
    gathered, total, best = _gather(
        gathered, total, best, q, key, value, begin, clear, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, True,
    )  # fmt: skip
    gathered, total, best = _gather(
        gathered, total, best, q, key, value, clear, diagonal, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, False,
    )  # fmt: skip
    gathered, total, best = _gather(
        gathered, total, best, q, key, value, diagonal, end, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, True,
    )  # fmt: skip
    tl.store(
        log_sums + tl.program_id(1).to(tl.int64) * length + row,
        best + tl.log2(total),
        mask=row < length,
    )
    gathered = gathered / total[:, None]
    at = ((batch * length + row) * heads + head)[:, None] * WIDTH + location[None, :]
    here = (row < length)[:, None] & (location < WIDTH)[None, :]
    tl.store(output + at, gathered.to(output.dtype.element_ty), mask=here)


@triton.jit
def _gather(
    gathered, total, best, q, key, value, begin, end, row, start, window, length, scale,
    key_token, value_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for at in range(begin, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        k = _tile(key, at, length, key_token, COLUMNS, WIDTH, WIDE, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(_sees(row, start, column, window), scores, _HIDDEN)
        higher = tl.maximum(best, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(best - higher)
        total = total * faded + tl.sum(shares, 1)
        v = _tile(value, at, length, value_token, COLUMNS, WIDTH, WIDE, MASKED)
        gathered = gathered * faded[:, None]
        gathered = tl.dot(shares.to(v.dtype), v, gathered, input_precision="ieee")
        best = higher
    return gathered, total, best


@triton.jit
def row_sums(
    output, grad_output, sums, length, heads,
    grad_batch, grad_token, grad_head,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What each row of the output is, times its gradient: (batch, heads, length)."""
    first = tl.program_id(0) * ROWS
    row, position = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    here = (row < length)[:, None] & (position < WIDTH)[None, :]
    at = ((batch * length + row) * heads + head)[:, None] * WIDTH + position[None, :]
    o = tl.load(output + at, mask=here, other=0.0).to(tl.float32)
    grad_output += batch * grad_batch + head * grad_head
    g = _tile(grad_output, first, length, grad_token, ROWS, WIDTH, WIDE, True).to(tl.float32)
    to = sums + tl.program_id(1).to(tl.int64) * length + row
    tl.store(to, tl.sum(o * g, 1), mask=row < length)


@triton.jit
def backward_queries(
    query, key, value, bounds, grad_output, log_sums, sums, grad_query, scale, window, length,
    heads, group,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    grad_batch, grad_token, grad_head,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, a tile of rows each: (batch, length, heads, width)."""
    first = tl.program_id(0) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row, location = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    starts = bounds + batch * 2 * length
    start = tl.load(starts + row, mask=row < length, other=0)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    grad_output += batch * grad_batch + head * grad_head
    q = _tile(query, first, length, query_token, ROWS, WIDTH, WIDE, True)
    g = _tile(grad_output, first, length, grad_token, ROWS, WIDTH, WIDE, True)
    line = tl.program_id(1).to(tl.int64) * length + row
    log_sum = tl.load(log_sums + line, mask=row < length, other=0.0)
    sum_ = tl.load(sums + line, mask=row < length, other=0.0)
    begin, clear, diagonal, end = _column_bounds(starts, first, length, window, ROWS, COLUMNS)
    grad = tl.zeros([ROWS, WIDE], tl.float32)
    grad = _query_grad(
        grad, q, g, log_sum, sum_, key, value, begin, clear, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, True,
    )  # fmt: skip
    grad = _query_grad(
        grad, q, g, log_sum, sum_, key, value, clear, diagonal, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, False,
    )  # fmt: skip
    grad = _query_grad(
        grad, q, g, log_sum, sum_, key, value, diagonal, end, row, start, window, length, scale,
        key_token, value_token, WIDTH, WIDE, COLUMNS, True,
    )  # fmt: skip
    # `scale` is that of powers of 2; gradients are of powers of e.
    grad = grad * (scale * 0.6931471805599453)
    at = ((batch * length + row) * heads + head)[:, None] * WIDTH + location[None, :]
    here = (row < length)[:, None] & (location < WIDTH)[None, :]
    tl.store(grad_query + at, grad.to(grad_query.dtype.element_ty), mask=here)


@triton.jit
def _query_grad(
    grad, q, g, log_sum, sum_, key, value, begin, end, row, start, window, length, scale,
    key_token, value_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for at in range(begin, end, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        k = _tile(key, at, length, key_token, COLUMNS, WIDTH, WIDE, MASKED)
        v = _tile(value, at, length, value_token, COLUMNS, WIDTH, WIDE, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        shares = tl.exp2(scores - log_sum[:, None])
        if MASKED:
            shares = tl.where(_sees(row, start, column, window), shares, 0.0)
        of_shares = tl.dot(g, tl.trans(v), input_precision="ieee")
        of_scores = shares * (of_shares - sum_[:, None])
        grad = tl.dot(of_scores.to(k.dtype), k, grad, input_precision="ieee")
    return grad


@triton.jit
def backward_keys(
    query, key, value, bounds, grad_output, log_sums, sums, grad_key, grad_value, scale, window,
    length, heads, group,
    query_batch, query_head, query_token,
    key_batch, key_head, key_token,
    value_batch, value_head, value_token,
    grad_batch, grad_token, grad_head,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, a tile of columns each: (batch, length, key heads, width)."""
    first = tl.program_id(0) * COLUMNS
    key_heads = heads // group
    batch, head = (tl.program_id(1) // key_heads).to(tl.int64), tl.program_id(1) % key_heads
    column, location = first + tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    starts = bounds + batch * 2 * length
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    k = _tile(key, first, length, key_token, COLUMNS, WIDTH, WIDE, True)
    v = _tile(value, first, length, value_token, COLUMNS, WIDTH, WIDE, True)
    last = tl.minimum(first + COLUMNS, length) - 1
    end = tl.minimum(tl.load(starts + length + last), last + window)
    of_key = tl.zeros([COLUMNS, WIDE], tl.float32)
    of_value = tl.zeros([COLUMNS, WIDE], tl.float32)
    for member in range(group):
        at = head * group + member
        q = query + batch * query_batch + at * query_head
        g = grad_output + batch * grad_batch + at * grad_head
        line = (batch * heads + at) * length
        of_key, of_value = _key_grads(
            of_key, of_value, k, v, q, g, log_sums + line, sums + line, starts,
            first // ROWS * ROWS, end, column, window, length, scale, query_token, grad_token,
            WIDTH, WIDE, ROWS,
        )  # fmt: skip
    of_key = of_key * (scale * 0.6931471805599453)
    at = ((batch * length + column) * key_heads + head)[:, None] * WIDTH + location[None, :]
    here = (column < length)[:, None] & (location < WIDTH)[None, :]
    tl.store(grad_key + at, of_key.to(grad_key.dtype.element_ty), mask=here)
    tl.store(grad_value + at, of_value.to(grad_value.dtype.element_ty), mask=here)


@triton.jit
def _key_grads(
    of_key, of_value, k, v, query, grad_output, log_sums, sums, starts, begin, end,
    column, window, length, scale, query_token, grad_token,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for at in range(begin, end, ROWS):
        row = at + tl.arange(0, ROWS)
        here = row < length
        q = _tile(query, at, length, query_token, ROWS, WIDTH, WIDE, True)
        g = _tile(grad_output, at, length, grad_token, ROWS, WIDTH, WIDE, True)
        log_sum = tl.load(log_sums + row, mask=here, other=0.0)
        sum_ = tl.load(sums + row, mask=here, other=0.0)
        # Turned over: (columns, rows), so that both products below take it as it is.
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
        shares = tl.exp2(scores - log_sum[None, :])
        # Tiles that no border crosses are masked, too: apart, they would take registers to spill.
        start = tl.load(starts + row, mask=here, other=0)
        # A row behind the last is of no sequence.
        seen = _sees(row, start, column, window) & here[:, None]
        shares = tl.where(tl.trans(seen), shares, 0.0)
        of_value = tl.dot(shares.to(g.dtype), g, of_value, input_precision="ieee")
        of_shares = tl.dot(v, tl.trans(g), input_precision="ieee")
        of_scores = shares * (of_shares - sum_[None, :])
        of_key = tl.dot(of_scores.to(q.dtype), q, of_key, input_precision="ieee")
    return of_key, of_value


@triton.jit
def _column_bounds(starts, first, length, window, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the columns begin that a tile of rows sees, are seen by all, meet it, and end."""
    end = tl.minimum(first + ROWS, length)
    low = tl.maximum(tl.load(starts + first), first - window + 1)
    begin = tl.maximum(low, 0) // COLUMNS * COLUMNS
    diagonal = first // COLUMNS * COLUMNS
    high = tl.maximum(tl.load(starts + end - 1), end - window)
    clear = tl.cdiv(tl.maximum(high, 0), COLUMNS) * COLUMNS
    clear = tl.minimum(tl.maximum(clear, begin), diagonal)
    return begin, clear, diagonal, end


@triton.jit
def _sees(row, start, column, window):
    near = (column[None, :] <= row[:, None]) & (row[:, None] - column[None, :] < window)
    return near & (column[None, :] >= start[:, None])


@triton.jit
def _tile(
    source, first, length, stride,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head; with `MASKED`, those behind the last are 0."""
    token, location = first + tl.arange(0, TOKENS), tl.arange(0, WIDE)
    at = source + token[:, None].to(tl.int64) * stride + location[None, :]
    if MASKED or WIDTH != WIDE:
        here = (token < length)[:, None] & (location < WIDTH)[None, :]
        return tl.load(at, mask=here, other=0.0)
    return tl.load(at)
