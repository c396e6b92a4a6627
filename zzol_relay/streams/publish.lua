-- Publish one event: at most once per dedup window, in sequence order per aggregate.
--
-- KEYS  1 stream  2 shard hash (epoch, retention_ms)  3 seen  4 tail of the aggregate, or ''  5 seen of this replay
-- ARGV  1 mode (next|head|replay|restore|unordered)  2 epoch under which the order was proven
--       3 sequence  4 sequence before it  5 dedup window, ms  6 tail TTL, ms  7... the entry's fields
--
-- Replies with one string: PUBLISHED <entry id> | DUPLICATE <entry id> | PAST <tail> | DEFERRED <tail> | EPOCH <epoch>
--
-- Reads, then XADD, then the keys: a failing XADD (OOM, WRONGTYPE) must not leave the event remembered as published,
-- and Redis does not roll a script back.
local mode = ARGV[1]
local ordered = mode == 'next' or mode == 'head'
local replay = mode == 'replay'

local shard = redis.call('HMGET', KEYS[2], 'epoch', 'retention_ms')
-- Redis lost data, or came back older, since the order was proven: the proof says nothing any more.
if (ordered or mode == 'unordered') and shard[1] ~= ARGV[2] then
  return 'EPOCH ' .. (shard[1] or '')
end

-- A replay is an operator's wish and passes the first publication's memory, but no replay happens twice.
local seen = redis.call('GET', replay and KEYS[5] or KEYS[3])
if seen then
  return 'DUPLICATE ' .. seen
end

local sequence = tonumber(ARGV[3])
if ordered then
  local tail = tonumber(redis.call('GET', KEYS[4]) or '0')
  if sequence <= tail then
    return string.format('PAST %.0f', tail)
  end
  if mode == 'next' and tail ~= tonumber(ARGV[4]) then
    return string.format('DEFERRED %.0f', tail)
  end
end

local id
local retention = tonumber(shard[2] or '0')
if retention > 0 then
  local now = redis.call('TIME')
  local horizon = string.format('%.0f', now[1] * 1000 + math.floor(now[2] / 1000) - retention)
  id = redis.call('XADD', KEYS[1], 'MINID', '~', horizon, '*', unpack(ARGV, 7))
else
  id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 7))
end

redis.call('SET', KEYS[3], id, 'PX', ARGV[5])
if replay then
  redis.call('SET', KEYS[5], id, 'PX', ARGV[5])
elseif ordered then
  -- Replay and restore leave the tail alone: they stand outside the order.
  redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[6])
end
return 'PUBLISHED ' .. id
