-- Read a shard's epoch; begin a new one where Redis shows that it lost data.
--
-- KEYS  1 stream  2 shard hash (epoch, retention_ms, lost_to)
-- ARGV  1 a fresh epoch  2 highest entry id known to have been acknowledged, or ''  3 retention, ms, or '' to keep
--
-- Replies {epoch, last generated id, verdict}; verdict: same | new (there was none) | behind (the stream is older than
-- an acknowledged entry: an older RDB, or a failover to a replica that had not caught up; the epoch key came with it) |
-- hole (others have written to the older stream since, the direct path say, so that its last id tells nothing; but the
-- acknowledged entry is not there, while older ones are: trimming takes from the old end only).
local function parse(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function below(a, b)
  local a_ms, a_number = parse(a)
  local b_ms, b_number = parse(b)
  return a_ms < b_ms or (a_ms == b_ms and a_number < b_number)
end

local last = '0-0'
if redis.call('TYPE', KEYS[1]).ok == 'stream' then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last = info[i + 1]
    end
  end
end

local known = ARGV[2]
local shard = redis.call('HMGET', KEYS[2], 'epoch', 'lost_to')
local epoch, lost_to = shard[1], shard[2]
local verdict = 'same'
if not epoch then
  verdict = 'new'
elseif known == '' or (lost_to and not below(lost_to, known)) then
  -- One loss, one new epoch: whoever comes later with the same knowledge finds it announced.
  verdict = 'same'
elseif below(last, known) then
  verdict = 'behind'
elseif below(known, last)
  and #redis.call('XRANGE', KEYS[1], known, known) == 0
  and #redis.call('XRANGE', KEYS[1], '-', known, 'COUNT', 1) == 1
then
  verdict = 'hole'
end
if verdict ~= 'same' then
  epoch = ARGV[1]
  redis.call('HSET', KEYS[2], 'epoch', epoch)
  if known ~= '' then
    redis.call('HSET', KEYS[2], 'lost_to', known)
  end
end
if ARGV[3] ~= '' and redis.call('HGET', KEYS[2], 'retention_ms') ~= ARGV[3] then
  redis.call('HSET', KEYS[2], 'retention_ms', ARGV[3])
end
return {epoch, last, verdict}
