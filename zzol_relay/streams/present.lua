-- Which of these entries are in the stream? Asked here, so that no payload travels to be looked at.
--
-- KEYS  1 stream  2 shard hash
-- ARGV  entry id, event id, entry id, event id ...
--
-- Replies one letter per pair: P present | A absent | T absent, and old enough to have been trimmed.
local retention = tonumber(redis.call('HGET', KEYS[2], 'retention_ms') or '0')
local horizon = 0
if retention > 0 then
  local now = redis.call('TIME')
  horizon = now[1] * 1000 + math.floor(now[2] / 1000) - retention
end
local is_stream = redis.call('TYPE', KEYS[1]).ok == 'stream'

local function present(entry_id, event_id)
  local found = redis.call('XRANGE', KEYS[1], entry_id, entry_id)
  if #found == 0 then
    return false
  end
  -- A Redis whose clock went back may have given the id to another event.
  local fields = found[1][2]
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then
      return fields[i + 1] == event_id
    end
  end
  return false
end

local letters = {}
for i = 1, #ARGV, 2 do
  if is_stream and present(ARGV[i], ARGV[i + 1]) then
    letters[#letters + 1] = 'P'
  elseif tonumber(string.match(ARGV[i], '^%d+')) < horizon then
    letters[#letters + 1] = 'T'
  else
    letters[#letters + 1] = 'A'
  end
end
return table.concat(letters)
