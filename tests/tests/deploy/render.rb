# Renders a BOSH job as a director does, with the same ERB: a small evaluation context with
# p, if_p, spec, link and if_link.
#
#   ruby render.rb JOB_FOLDER < MANIFESTS > RESULTS
#
# MANIFESTS: JSON, a list of {"properties": {..}, "spec": {..}}.
# RESULTS: JSON, for each {"files": {path: text}} or {"error": text}.

require 'erb'
require 'json'
require 'ostruct'
require 'yaml'

# What templates see.
class Context
  # A property or link that nobody gave.
  class Missing < StandardError; end

  # What follows an if_p.
  Otherwise = Struct.new(:taken, :context) do
    def else
      yield unless taken
    end

    def else_if_p(*names, &block)
      taken ? self : context.if_p(*names, &block)
    end
  end

  attr_reader :spec

  def initialize(properties, spec)
    @properties = properties
    @spec = OpenStruct.new(spec)
  end

  def p(names, *default)
    Array(names).each do |name|
      value = find(name)
      return value unless value.nil?
    end
    return default.first unless default.empty?

    raise Missing, "Can't find property '#{Array(names).join("', or '")}'"
  end

  def if_p(*names)
    values = names.map { |name| find(name) }
    return Otherwise.new(false, self) if values.any?(&:nil?)

    yield(*values)
    Otherwise.new(true, self)
  end

  def link(name)
    raise Missing, "Can't find link '#{name}'"
  end

  def if_link(_name)
    Otherwise.new(false, self)
  end

  def render(template, name)
    erb = ERB.new(template, trim_mode: '-')
    erb.filename = name
    erb.result(binding)
  end

  private

  def find(name)
    name.split('.').reduce(@properties) { |object, key| object.is_a?(Hash) ? object[key] : nil }
  end
end

# The properties that the job knows, each from the manifest or by its default: a director
# hands no others over.
def known(definitions, given)
  definitions.each_with_object({}) do |(name, definition), all|
    keys = name.split('.')
    value = keys.reduce(given) { |object, key| object.is_a?(Hash) ? object[key] : nil }
    value = (definition || {})['default'] if value.nil?
    next if value.nil?

    keys[0..-2].reduce(all) { |object, key| object[key] ||= {} }[keys.last] = value
  end
end

job = ARGV.fetch(0)
definition = YAML.safe_load(File.read(File.join(job, 'spec')))
templates = definition['templates'].to_h do |source, target|
  [target, File.read(File.join(job, 'templates', source))]
end
templates['monit'] = File.read(File.join(job, 'monit'))
everywhere = { 'index' => 0, 'name' => 'cell', 'deployment' => 'cf', 'id' => 'id-1', 'az' => 'z1' }

results = JSON.parse($stdin.read).map do |manifest|
  properties = known(definition['properties'], manifest['properties'] || {})
  context = Context.new(properties, everywhere.merge(manifest['spec'] || {}))
  { 'files' => templates.to_h { |target, template| [target, context.render(template, target)] } }
rescue StandardError => e
  { 'error' => e.message }
end
puts JSON.generate(results)
